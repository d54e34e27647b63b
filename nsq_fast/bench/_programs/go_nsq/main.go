// go-nsq as a measured client: consume, publish, roundtrip, idle, under the same contract as the Python programs
// (see meter.py): settings as one JSON object in argv[1], events as JSON lines on stdout.
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"os"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nsqio/go-nsq"
)

const (
	stampBytes = 8
	tick       = time.Millisecond
)

var quantiles = []float64{0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 100}

type settings struct {
	Nsqds        [][]any `json:"nsqds"`
	Topic        string  `json:"topic"`
	Channel      string  `json:"channel"`
	Count        int64   `json:"count"`
	Warmup       int64   `json:"warmup"`
	MaxInFlight  int     `json:"max_in_flight"`
	Size         int     `json:"size"`
	Kind         string  `json:"kind"`
	Mode         string  `json:"mode"`
	Variant      string  `json:"variant"`
	Concurrency  int     `json:"concurrency"`
	Batch        int     `json:"batch"`
	Rate         float64 `json:"rate"`
	HandlerSleep float64 `json:"handler_sleep"`
	Compression  string  `json:"compression"`
	TLS          bool    `json:"tls"`
	CAFile       string  `json:"cafile"`
	Settle       float64 `json:"settle"`
	Duration     float64 `json:"duration"`
	Beyond       int64   `json:"beyond"`
	Unbuffered   bool    `json:"unbuffered"`
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func usage() float64 {
	var used syscall.Rusage
	must(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	seconds := func(t syscall.Timeval) float64 { return float64(t.Sec) + float64(t.Usec)/1e6 }
	return seconds(used.Utime) + seconds(used.Stime)
}

// peakKib is the peak resident memory of this program; getrusage would count its parent's before exec.
func peakKib() (peak int64) {
	status, err := os.ReadFile("/proc/self/status")
	must(err)
	_, rest, _ := bytes.Cut(status, []byte("VmHWM:"))
	_, err = fmt.Sscan(string(rest), &peak)
	must(err)
	return peak
}

// meter is the clock between the end of the warm-up and the last message.
type meter struct {
	job       settings
	taken     int64
	wall      time.Time
	cpu       float64
	lock      sync.Mutex
	latencies []int64
	done      chan struct{}
}

func newMeter(job settings) *meter {
	return &meter{job: job, done: make(chan struct{}), latencies: make([]int64, 0, job.Count)}
}

func emit(event map[string]any) { must(json.NewEncoder(os.Stdout).Encode(event)) }

func (m *meter) start() {
	emit(map[string]any{"event": "started"})
	m.lock.Lock()
	m.latencies = m.latencies[:0]
	m.lock.Unlock()
	m.wall = time.Now()
	m.cpu = usage()
}

// take counts one message; the last one reports.
func (m *meter) take() {
	switch atomic.AddInt64(&m.taken, 1) - 1 {
	case m.job.Warmup:
		m.start()
	case m.job.Count - 1:
		m.report(m.job.Count - 1 - m.job.Warmup)
		close(m.done)
	}
}

func (m *meter) seen(stamp int64) {
	latency := time.Now().UnixNano() - stamp
	m.lock.Lock()
	m.latencies = append(m.latencies, latency)
	m.lock.Unlock()
}

func (m *meter) report(messages int64) {
	cpu, wall := usage(), time.Since(m.wall)
	m.lock.Lock()
	defer m.lock.Unlock()
	emit(map[string]any{
		"event":       "result",
		"messages":    messages,
		"seconds":     wall.Seconds(),
		"cpu_seconds": cpu - m.cpu,
		"peak_kib":    peakKib(),
		"latency_us":  quantilesOf(m.latencies),
	})
}

func quantilesOf(latencies []int64) [][]float64 {
	result := [][]float64{}
	if len(latencies) == 0 {
		return result
	}
	sort.Slice(latencies, func(i, j int) bool { return latencies[i] < latencies[j] })
	last := float64(len(latencies) - 1)
	for _, share := range quantiles {
		result = append(result, []float64{share, float64(latencies[int(math.RoundToEven(last*share/100))]) / 1000})
	}
	return result
}

func (job settings) addresses() (all []string) {
	for _, address := range job.Nsqds {
		all = append(all, fmt.Sprintf("%v:%v", address[0], address[1]))
	}
	return all
}

func (job settings) config() *nsq.Config {
	config := nsq.NewConfig()
	config.MaxInFlight = job.MaxInFlight
	set := func(option string, value any) { must(config.Set(option, value)) }
	if job.Compression != "" {
		set(job.Compression, true)
	}
	if job.Unbuffered {
		set("output_buffer_size", -1)
	}
	if job.TLS {
		set("tls_v1", true)
		set("tls_root_ca_file", job.CAFile)
	}
	return config
}

func (job settings) body(stamp int64) []byte {
	body := bytes.Repeat([]byte("x"), max(job.Size, stampBytes))
	binary.BigEndian.PutUint64(body, uint64(stamp))
	return body
}

func stampOf(message *nsq.Message) int64 { return int64(binary.BigEndian.Uint64(message.Body)) }

func startConsumer(job settings, handle nsq.HandlerFunc) {
	consumer, err := nsq.NewConsumer(job.Topic, job.Channel, job.config())
	must(err)
	consumer.SetLogger(log.New(os.Stderr, "", 0), nsq.LogLevelError)
	consumer.AddConcurrentHandlers(handle, max(1, job.Concurrency))
	must(consumer.ConnectToNSQDs(job.addresses()))
}

func startProducer(job settings) *nsq.Producer {
	producer, err := nsq.NewProducer(job.addresses()[0], job.config())
	must(err)
	producer.SetLogger(log.New(os.Stderr, "", 0), nsq.LogLevelError)
	must(producer.Ping())
	return producer
}

func consume(job settings) {
	clock := newMeter(job)
	pause := time.Duration(job.HandlerSleep * float64(time.Second))
	startConsumer(job, func(message *nsq.Message) error {
		if pause > 0 {
			time.Sleep(pause)
		}
		if job.Rate > 0 {
			clock.seen(stampOf(message))
		}
		clock.take()
		return nil
	})
	<-clock.done
}

// ticks calls send with each due time and the number of messages due then; the times are fixed in advance.
func ticks(rate float64, count int64, send func(due int64, many int64)) {
	timer := newAlarm()
	start, sent := time.Now(), int64(0)
	step := max(tick, time.Duration(float64(time.Second)/rate))
	for number := 1; sent < count; number++ {
		at := start.Add(time.Duration(number) * step)
		due := min(count, int64(float64(number)*step.Seconds()*rate))
		if due > sent {
			timer.until(at)
			send(at.UnixNano(), due-sent)
		}
		sent = due
	}
}

func publishAsync(job settings, clock *meter, producer *nsq.Producer, count int64) {
	answers := make(chan *nsq.ProducerTransaction, job.MaxInFlight)
	var answered sync.WaitGroup
	answered.Add(1)
	go func() {
		defer answered.Done()
		for i := int64(0); i < count; i++ {
			answer := <-answers
			must(answer.Error)
			if job.Rate > 0 {
				clock.seen(answer.Args[0].(int64))
			}
		}
	}()
	body := job.body(0)
	if job.Rate > 0 {
		ticks(job.Rate, count, func(due int64, many int64) {
			for ; many > 0; many-- {
				must(producer.PublishAsync(job.Topic, body, answers, due))
			}
		})
	} else {
		for i := int64(0); i < count; i++ {
			must(producer.PublishAsync(job.Topic, body, answers))
		}
	}
	answered.Wait()
}

func publishSingle(job settings, clock *meter, producer *nsq.Producer, count int64) {
	body := job.body(0)
	for i := int64(0); i < count; i++ {
		start := time.Now().UnixNano()
		must(producer.Publish(job.Topic, body))
		clock.seen(start)
	}
}

func publishConcurrent(job settings, producer *nsq.Producer, count int64) {
	body := job.body(0)
	var group sync.WaitGroup
	for worker := 0; worker < job.Concurrency; worker++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for i := int64(0); i < count/int64(job.Concurrency); i++ {
				must(producer.Publish(job.Topic, body))
			}
		}()
	}
	group.Wait()
}

func publishBatches(job settings, producer *nsq.Producer, count int64) {
	batch := make([][]byte, job.Batch)
	for i := range batch {
		batch[i] = job.body(0)
	}
	for i := int64(0); i < count/int64(job.Batch); i++ {
		must(producer.MultiPublish(job.Topic, batch))
	}
}

func publishMode(job settings, clock *meter, producer *nsq.Producer, count int64) {
	switch {
	case job.Rate > 0 || job.Variant == "async":
		publishAsync(job, clock, producer, count)
	case job.Mode == "single":
		publishSingle(job, clock, producer, count)
	case job.Mode == "concurrent":
		publishConcurrent(job, producer, count)
	default:
		publishBatches(job, producer, count)
	}
}

func publish(job settings) {
	producer := startProducer(job)
	clock := newMeter(job)
	publishMode(job, clock, producer, job.Warmup)
	clock.start()
	publishMode(job, clock, producer, job.Count)
	clock.report(job.Count)
}

func roundtrip(job settings) {
	clock := newMeter(job)
	window := make(chan struct{}, max(1, job.Concurrency))
	single := job
	single.Concurrency = 1
	startConsumer(single, func(message *nsq.Message) error {
		clock.seen(stampOf(message))
		if job.Rate == 0 {
			<-window
		}
		clock.take()
		return nil
	})
	producer := startProducer(job)
	if job.Rate > 0 {
		ticks(job.Rate, job.Count+job.Beyond, func(due int64, many int64) {
			for ; many > 0; many-- {
				must(producer.PublishAsync(job.Topic, job.body(due), nil))
			}
		})
	} else {
		for i := int64(0); i < job.Count+job.Beyond; i++ {
			window <- struct{}{}
			must(producer.PublishAsync(job.Topic, job.body(time.Now().UnixNano()), nil))
		}
	}
	<-clock.done
}

func idle(job settings) {
	seconds := func(value float64) time.Duration { return time.Duration(value * float64(time.Second)) }
	clock := newMeter(job)
	startConsumer(job, func(*nsq.Message) error { return nil })
	time.Sleep(seconds(job.Settle))
	clock.start()
	time.Sleep(seconds(job.Duration))
	clock.report(0)
}

func main() {
	var job settings
	must(json.Unmarshal([]byte(os.Args[1]), &job))
	kinds := map[string]func(settings){"consume": consume, "publish": publish, "roundtrip": roundtrip, "idle": idle}
	kinds[job.Kind](job)
}
