// One publisher or consumer that uses go-nsq as its documents do; see program.py, which is the same in Python.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"log"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nsqio/go-nsq"
)

var (
	lock sync.Mutex
	out  bytes.Buffer // to the end: nobody reads before
)

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func write(number int64, outcome string) {
	lock.Lock()
	defer lock.Unlock()
	fmt.Fprintf(&out, "[%d, %q, %.6f]\n", number, outcome, float64(time.Now().UnixNano())/1e9)
}

type handler struct{}

func (handler) HandleMessage(message *nsq.Message) error {
	number, err := strconv.ParseInt(string(message.Body), 10, 64)
	must(err)
	write(number, "handled")
	return nil
}

func publish(address, topic string, workers int, pause time.Duration, end chan struct{}) {
	producer, err := nsq.NewProducer(address, nsq.NewConfig())
	must(err)
	producer.SetLoggerLevel(nsq.LogLevelMax)
	var next int64
	var group sync.WaitGroup
	for range make([]struct{}, workers) {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				select {
				case <-end:
					return
				case <-time.After(pause):
				}
				number := atomic.AddInt64(&next, 1)
				outcome := "OK"
				if err := producer.Publish(topic, []byte(strconv.FormatInt(number, 10))); err != nil {
					outcome = err.Error()
				}
				write(number, outcome)
			}
		}()
	}
	group.Wait()
	producer.Stop()
}

func consume(address, topic string, end chan struct{}) {
	config := nsq.NewConfig()
	config.MaxInFlight = 50
	config.MaxAttempts = 0
	consumer, err := nsq.NewConsumer(topic, "channel", config)
	must(err)
	consumer.SetLoggerLevel(nsq.LogLevelMax)
	consumer.AddHandler(handler{})
	must(consumer.ConnectToNSQD(address))
	<-end
	consumer.Stop()
	<-consumer.StopChan
}

func main() {
	role, address, topic := os.Args[1], os.Args[2], os.Args[3]
	workers, err := strconv.Atoi(os.Args[4])
	must(err)
	pause, err := time.ParseDuration(os.Args[5] + "s")
	must(err)
	end := make(chan struct{})
	go func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		close(end)
	}()
	if role == "publish" {
		publish(address, topic, workers, pause, end)
	} else {
		consume(address, topic, end)
	}
	_, err = out.WriteTo(os.Stdout)
	must(err)
}
