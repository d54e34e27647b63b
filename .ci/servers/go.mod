// The real servers that `make servers` builds for the tests, at the version that is pinned here.
module nsq_fast.servers

go 1.17

require github.com/nsqio/nsq v1.3.0

// As nsq's own go.mod has it: it needs what no release of go-svc has.
replace github.com/judwhite/go-svc => github.com/mreiferson/go-svc v1.2.2-0.20210815184239-7a96e00010f6
