package main

import (
	"os"
	"syscall"
	"time"
	"unsafe"
)

// alarm waits until a due time, as Alarm in meter.py does: time.Sleep waits by the millisecond, too.
type alarm struct {
	descriptor uintptr
	file       *os.File
}

const (
	clockRealtime = 0 // <time.h>
	timerAbsolute = 1 // <sys/timerfd.h>, TFD_TIMER_ABSTIME
)

func newAlarm() *alarm {
	flags := uintptr(syscall.O_NONBLOCK | syscall.O_CLOEXEC)
	descriptor, _, failure := syscall.Syscall(syscall.SYS_TIMERFD_CREATE, clockRealtime, flags, 0)
	if failure != 0 {
		must(failure)
	}
	return &alarm{descriptor, os.NewFile(descriptor, "timer")}
}

func (a *alarm) until(due time.Time) {
	if !time.Now().Before(due) {
		return
	}
	spec := struct{ interval, value syscall.Timespec }{value: syscall.NsecToTimespec(due.UnixNano())}
	pointer := uintptr(unsafe.Pointer(&spec))
	_, _, failure := syscall.Syscall6(syscall.SYS_TIMERFD_SETTIME, a.descriptor, timerAbsolute, pointer, 0, 0, 0)
	if failure != 0 {
		must(failure)
	}
	_, err := a.file.Read(make([]byte, 8))
	must(err)
}
