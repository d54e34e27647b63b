//go:build !linux

package main

import "time"

type alarm struct{}

func newAlarm() *alarm { return &alarm{} }

func (a *alarm) until(due time.Time) { time.Sleep(time.Until(due)) }
