// Consume or publish with go-nsq, under the same contract as the Python clients:
// settings as one JSON object in argv[1], the result as one JSON object on stdout.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nsqio/go-nsq"
)

type settings struct {
	Nsqd        []any  `json:"nsqd"`
	Topic       string `json:"topic"`
	Channel     string `json:"channel"`
	Count       int64  `json:"count"`
	Warmup      int64  `json:"warmup"`
	MaxInFlight int    `json:"max_in_flight"`
	Size        int    `json:"size"`
	Mode        string `json:"mode"`
}

type meter struct {
	wall time.Time
	cpu  float64
}

func usage() float64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		log.Fatal(err)
	}
	seconds := func(t syscall.Timeval) float64 { return float64(t.Sec) + float64(t.Usec)/1e6 }
	return seconds(used.Utime) + seconds(used.Stime)
}

// peakKib is the peak resident memory of this program; getrusage would count its parent's before exec.
func peakKib() (peak int64) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		log.Fatal(err)
	}
	_, rest, _ := bytes.Cut(status, []byte("VmHWM:"))
	if _, err := fmt.Sscan(string(rest), &peak); err != nil {
		log.Fatal(err)
	}
	return peak
}

func (m *meter) start() {
	m.wall = time.Now()
	m.cpu = usage()
}

func (m *meter) report(messages int64) {
	cpu := usage()
	result := map[string]any{
		"messages":    messages,
		"seconds":     time.Since(m.wall).Seconds(),
		"cpu_seconds": cpu - m.cpu,
		"peak_kib":    peakKib(),
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		log.Fatal(err)
	}
}

func consume(told settings, address string) {
	config := nsq.NewConfig()
	config.MaxInFlight = told.MaxInFlight
	consumer, err := nsq.NewConsumer(told.Topic, told.Channel, config)
	if err != nil {
		log.Fatal(err)
	}
	consumer.SetLogger(log.New(os.Stderr, "", 0), nsq.LogLevelError)
	var clock meter
	var seen int64
	done := make(chan struct{})
	consumer.AddHandler(nsq.HandlerFunc(func(*nsq.Message) error {
		switch atomic.AddInt64(&seen, 1) {
		case told.Warmup + 1:
			clock.start()
		case told.Count:
			clock.report(told.Count - told.Warmup)
			close(done)
		}
		return nil
	}))
	if err := consumer.ConnectToNSQD(address); err != nil {
		log.Fatal(err)
	}
	<-done
}

func publish(told settings, address string) {
	producer, err := nsq.NewProducer(address, nsq.NewConfig())
	if err != nil {
		log.Fatal(err)
	}
	producer.SetLogger(log.New(os.Stderr, "", 0), nsq.LogLevelError)
	body := bytes.Repeat([]byte("x"), told.Size)
	must := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	must(producer.Publish(told.Topic, body))
	var clock meter
	clock.start()
	switch told.Mode {
	case "single":
		for i := int64(0); i < told.Count; i++ {
			must(producer.Publish(told.Topic, body))
		}
	case "greenlets":
		var group sync.WaitGroup
		for worker := 0; worker < 100; worker++ {
			group.Add(1)
			go func() {
				defer group.Done()
				for i := int64(0); i < told.Count/100; i++ {
					must(producer.Publish(told.Topic, body))
				}
			}()
		}
		group.Wait()
	default:
		batch := make([][]byte, 200)
		for i := range batch {
			batch[i] = body
		}
		for i := int64(0); i < told.Count/200; i++ {
			must(producer.MultiPublish(told.Topic, batch))
		}
	}
	clock.report(told.Count)
}

func main() {
	var told settings
	if err := json.Unmarshal([]byte(os.Args[1]), &told); err != nil {
		log.Fatal(err)
	}
	address := fmt.Sprintf("%v:%v", told.Nsqd[0], told.Nsqd[1])
	if told.Mode == "consume" {
		consume(told, address)
		return
	}
	publish(told, address)
}
