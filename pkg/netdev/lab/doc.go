// SPDX-License-Identifier: Apache-2.0

// Package lab builds small networks out of network namespaces, veth pairs and bridges, for tests and for the demo. It
// needs no external program (no ip, ethtool or tc), only Linux and the privileges that Probe names.
//
// A Lab owns everything that is made through it: Close ends the processes, unmounts the names and lets the kernel
// remove the interfaces with their namespaces. It may be called at any time and more than once, also after an error.
//
// The usual testbed is one call:
//
//	l := lab.New()
//	defer l.Close()
//	net, err := l.Steering(lab.SteeringOptions{Clients: 2, Engines: 3})
//	...
//	net.Balancer.Do(func() error { ... })                      // this goroutine's thread is in the balancer's namespace
//	ln, err := net.Engines[0].Listen("tcp", "10.77.2.1:8000")  // a listener inside an engine's namespace
//	c, err := net.Clients[0].Dial(ctx, "tcp", "10.77.0.1:8080")
//	p, err := net.Balancer.Start(exec.Command("./shunt", "serve", "--config", "shunt.yaml"))
//	p.Stop(5 * time.Second)                                    // SIGTERM, then SIGKILL
//
// The testbed: every host has one interface, eth0, on one bridge that lives in a namespace of its own, so the balancer
// is one-armed. Addresses, all with prefixes that hold everybody (no router):
//
//	balancer  10.77.0.1  fd77::1      (SteeringOptions.Extra adds more: a VIP or SNAT address of its own)
//	client N  10.77.1.N  fd77::1:N
//	engine N  10.77.2.N  fd77::2:N
//
// The balancer's own end keeps all defaults. The bridge's port that faces it is set up as XDP on veth needs it: tx
// checksum offload off (the program must see complete checksums), GRO on (without it, and without a program on the
// peer, redirected frames are dropped), and a pfifo queue of 4000 packets (the veth ring holds 256). No program is
// attached to a peer: that would take away the offloads of this end. tcx needs none of this: SteeringOptions.Plain
// leaves it out.
//
// With SteeringOptions.Name the namespaces are named NAME-lb, NAME-c1, NAME-e1, NAME-sw and mounted at /run/netns, so
// that `nsenter --net=/run/netns/NAME-lb` works beside a running lab. (`ip netns exec` works as well, but it hides
// /sys/fs/bpf.) A lab that was killed leaves named namespaces behind; Sweep removes them.
package lab
