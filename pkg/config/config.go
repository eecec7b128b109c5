// SPDX-License-Identifier: Apache-2.0

// Package config is the schema of shunt's configuration, its defaults, and the strict reading of it.
//
// The structs below are the whole truth about a key: its name, default, allowed values and meaning are struct tags, and
// the decoder, the effective configuration and the reference table are all derived from them. A key that the schema does
// not know, a key given twice, a number without its unit and a combination that could serve wrongly are errors with the
// line, the column and the source line; all of them are reported, not only the first.
//
// Tags: yaml = key, default = value of an unwritten key (in the spelling of the file), enum = allowed words,
// range = least and greatest value, doc = meaning.
package config

import (
	"net/netip"
	"net/url"
	"time"
)

// Config is one whole configuration. It is read-only after Load; a reload makes a new one.
type Config struct {
	Listen    netip.AddrPort `yaml:"listen" default:"0.0.0.0:8080" doc:"Address and port that clients connect to. :PORT listens on every address of both families."`
	Admin     Admin          `yaml:"admin" doc:"The operator's listener: health, metrics, status and control."`
	Pools     []Pool         `yaml:"pools" doc:"Backends that serve the same models, with one policy. At least one pool."`
	Paths     []string       `yaml:"paths" default:"default" doc:"Request paths that are forwarded; all others are 404. A * stands for one path segment, a last ** for one or more. The word default stands for the inference routes of the OpenAI, Anthropic and KServe v2 APIs."`
	Timeouts  Timeouts       `yaml:"timeouts" doc:"How long shunt waits, for what."`
	Retries   Retries        `yaml:"retries" doc:"Second attempts on another backend, before the first byte of an answer only."`
	Limits    Limits         `yaml:"limits" doc:"Bounds of the front end."`
	Session   Session        `yaml:"session" doc:"How requests of one session are recognised."`
	Tokens    Tokens         `yaml:"tokens" doc:"How prompts are counted."`
	AccessLog string         `yaml:"access_log" default:"stderr" doc:"One JSON line a request: stderr, stdout, off or the path of a file (appended to). Never prompt text, keys or session values."`
	Log       Log            `yaml:"log" doc:"The daemon's own log, on stderr."`

	Credentials string `yaml:"credentials" default:"auto" enum:"auto|strip|pass" doc:"What becomes of the client's Authorization, x-api-key and api-key headers. strip: they end at the front end. pass: backends get them, for engines that check keys themselves. auto: strip, unless connections are steered with target engine: the kernel passes them there in any case, so the front end does too."`

	Keys           string         `yaml:"keys" doc:"Path of a file of client keys, read again when it changes: one a line, the SHA-256 of the key in hex, and after a blank a name for the access log. With it every request must show one, as Authorization: Bearer, x-api-key or api-key, or gets 401. Peers need the same file; target engine is refused."`
	TLS            TLS            `yaml:"tls" doc:"TLS at listen, with HTTP/1.1. With steering.target peer the peers must show the same certificate; engine is refused."`
	ProxyProtocol  []netip.Prefix `yaml:"proxy_protocol" doc:"Addresses of balancers in front of listen whose connections begin with a PROXY header, version 1 or 2, which tells the client's address. They are never steered. A connection from any other address must not begin with one."`
	TrustedProxies []netip.Prefix `yaml:"trusted_proxies" doc:"Addresses of proxies in front of listen whose X-Forwarded-For is believed: from its end on up to the first address that is none of these, which is the client's. Backends are told that one. From others the header is dropped."`

	Steering Steering `yaml:"steering" doc:"The kernel path: follow-up connections of a session go to its backend without user space."`

	src source
}

// Admin is the operator's listener.
type Admin struct {
	Listen    netip.AddrPort `yaml:"listen" default:"127.0.0.1:9090" doc:"Address of the admin listener, or off. Off when only socket is given."`
	Socket    string         `yaml:"socket" doc:"Path of a unix socket that serves the same, mode 0600."`
	TokenFile string         `yaml:"token_file" doc:"File that holds a bearer token. With it, everything but health and metrics asks for the token on listen (not on socket); without it, nothing else is served to other hosts."`
}

// TLS at the front end's listener.
type TLS struct {
	Certificate string `yaml:"certificate" doc:"Path of a PEM file with the certificate and the chain above it. It and the key are read again when they change. Left out: no TLS."`
	Key         string `yaml:"key" doc:"Path of a PEM file with the certificate's key."`
}

// Pool is a group of backends that serve the same models.
type Pool struct {
	Name      string     `yaml:"name" default:"default" doc:"Name of the pool, in metrics and messages; at most 31 bytes."`
	Models    []string   `yaml:"models" doc:"Model names that this pool serves, and with them the adapters of theirs that its backends list at /v1/models. A model that some of the backends list goes to these. One pool may have none: it takes every name that no other pool lists, and requests without a model."`
	Policy    string     `yaml:"policy" default:"least_cost" doc:"How a backend is chosen. least_cost: where the request costs the fewest seconds, by learned speeds, queues and who holds its beginning. session: a known session goes to its backend, a new one where the fewest tokens are in flight. Others: prefix, consistent_hash, least_tokens, least_requests, least_queue, least_latency, power_of_two, round_robin, weighted_round_robin."`
	Backends  []Backend  `yaml:"backends" doc:"The inference servers. At least one."`
	Health    Health     `yaml:"health" doc:"Active checks. A backend gets no request and no steered connection before its first good one."`
	Limits    PoolLimits `yaml:"limits" doc:"Bounds on each backend of the pool."`
	Tokenizer Tokenizer  `yaml:"tokenizer" doc:"How this pool's prompts are counted."`

	KeyFrom string `yaml:"key_from" doc:"Path of a file that holds the key of this pool's backends, read again when it changes, or env:NAME for an environment variable of the daemon. Backends get it as Authorization: Bearer, and nothing of the client's own credentials. Refused with target engine."`

	Outlier   Outlier       `yaml:"outlier" doc:"What failing requests do to a backend whose checks are good: it is ejected, left alone for a while, and then probed by one request at a time until one is served. Failures are answers 500, 502 and 504, and answers that break off or never come; 4xx is served, 429 and 503 are neither."`
	SlowStart time.Duration `yaml:"slow_start" default:"30s" range:"0s..1h" doc:"A backend that came up or back takes this long to grow from a tenth of its weight to all of it; 0 = at once."`
}

// Backend is one inference server.
type Backend struct {
	Name   string         `yaml:"name" default:"" doc:"Name in metrics, logs, maps and commands; unique in the file, at most 31 bytes. Derived from the URL's host and port when left out."`
	URL    *url.URL       `yaml:"url" doc:"http or https URL of the server, with an optional path prefix; no user, query or fragment. Required."`
	Weight int            `yaml:"weight" default:"1" range:"1..1000" doc:"Capacity relative to the other backends of the pool."`
	Steer  netip.AddrPort `yaml:"steer" doc:"Address and port of the peer shunt on this backend's host, for target peer. Without it no connection is steered to this backend."`
}

// Health is a pool's active check.
type Health struct {
	Path     string        `yaml:"path" default:"auto" doc:"Path to get, which must answer 2xx. auto asks /health; where that answers 3xx, 4xx or 501 it asks /v1/models, and any answer below 500 or of 501 is good there."`
	Interval time.Duration `yaml:"interval" default:"2s" range:"100ms..1h" doc:"Time between checks of one backend, varied by a tenth."`
	Timeout  time.Duration `yaml:"timeout" default:"1s" range:"10ms..1m" doc:"How long one check may take."`
	Fall     int           `yaml:"fall" default:"3" range:"1..100" doc:"Failed checks in a row that take a backend out."`
	Rise     int           `yaml:"rise" default:"2" range:"1..100" doc:"Good checks in a row that bring a failed backend back. The first good check of a new one is enough."`
}

// Outlier is how a pool's requests eject a backend.
type Outlier struct {
	Failures int           `yaml:"failures" default:"5" range:"0..1000000" doc:"Failed requests in a row that eject a backend; 0 = none do."`
	Share    float64       `yaml:"share" default:"0.5" range:"0..1" doc:"Share of failed requests within window that ejects it; 0 = none does."`
	Volume   int           `yaml:"volume" default:"10" range:"1..1000000" doc:"Fewest requests within window that share is measured on."`
	Window   time.Duration `yaml:"window" default:"30s" range:"1s..1h" doc:"Time in which share is measured."`
	Hold     time.Duration `yaml:"hold" default:"10s" range:"100ms..1h" doc:"How long an ejected backend gets no request at all. Each failed probe doubles it."`
	MaxHold  time.Duration `yaml:"max_hold" default:"5m" range:"100ms..24h" doc:"The hold is never longer than this."`
	Panic    float64       `yaml:"panic" default:"0.5" range:"0..1" doc:"Share of the pool's backends, of those whose checks are good, that must be left: with fewer the ejected ones are used too. What checks took out is never used."`
}

// PoolLimits bounds each backend of a pool.
type PoolLimits struct {
	MaxInflightTokens int64 `yaml:"max_inflight_tokens" default:"0" range:"0..1000000000000" doc:"Most tokens in flight on one backend, from both planes; 0 = no bound. Beyond it requests get 503 and new connections are not steered."`
}

// Tokenizer is a pool's way of counting.
type Tokenizer struct {
	Encoding string `yaml:"encoding" default:"auto" enum:"auto|cl100k_base|o200k_base|o200k_harmony" doc:"Encoding for this pool's models; auto goes by the model's name (see tokens), and scales counts by what the engines report of theirs."`
	Family   string `yaml:"family" default:"auto" enum:"auto|openai|claude|llama3|qwen|deepseek|gemma|mistral" doc:"Family of this pool's models, whose chat template is counted; auto goes by the model's name."`
	File     string `yaml:"file" doc:"Path of a Hugging Face tokenizer.json, by which this pool's prompts are counted exactly, instead of by encoding. One that is not byte-level BPE with the split pattern of GPT-4, GPT-4o, Llama 3, Qwen 2 or 3, DeepSeek or gpt-oss is refused at the start."`
}

// Timeouts of the front end. There is no limit on a whole answer: a stream may last for hours.
type Timeouts struct {
	Connect    time.Duration `yaml:"connect" default:"5s" range:"10ms..1m" doc:"Connection to a backend, TLS included."`
	FirstByte  time.Duration `yaml:"first_byte" default:"10m" range:"100ms..24h" doc:"From the request's last byte to the answer's first: the queue and prefill of the engine, and for an answer that is not streamed all of it."`
	Idle       time.Duration `yaml:"idle" default:"5m" range:"100ms..24h" doc:"Between two bytes of an answer."`
	HeaderRead time.Duration `yaml:"header_read" default:"10s" range:"100ms..10m" doc:"For a client to send a request's head."`
	ClientIdle time.Duration `yaml:"client_idle" default:"2m" range:"1s..24h" doc:"For a kept-alive client connection without a request. Longer than the clients' own (Go: 90 s), so that they close first."`
	StopDelay  time.Duration `yaml:"stop_delay" default:"0s" range:"0s..10m" doc:"When asked to stop: how long to go on serving, not ready any more, so that other balancers and Kubernetes have taken this one out before the listener closes."`
	StopGrace  time.Duration `yaml:"stop_grace" default:"30s" range:"0s..24h" doc:"Then: how long open requests may take to end. What is left is cut."`
}

// Retries on another backend.
type Retries struct {
	Max    int     `yaml:"max" default:"2" range:"0..10" doc:"Further attempts of one request, each on a backend it has not tried. While none has taken a connection, every one may be tried. 0 turns retries off."`
	Budget float64 `yaml:"budget" default:"0.2" range:"0.01..1" doc:"Retries of what had been sent to a backend, as a share of all requests, so that an outage is not multiplied."`
}

// Limits of the front end. Only the L7 enforces them.
type Limits struct {
	MaxBody        Size `yaml:"max_body" default:"32MiB" range:"1KiB..4GiB" doc:"Largest request body; a larger one is 413."`
	MaxHeader      Size `yaml:"max_header" default:"64KiB" range:"1KiB..16MiB" doc:"Largest request head; a larger one is 431."`
	MaxConnections int  `yaml:"max_connections" default:"0" range:"0..10000000" doc:"Client connections open at once; a further one is closed. 0 = as many as the file descriptors allow."`
}

// Session recognition.
type Session struct {
	Headers []string      `yaml:"headers" default:"x-session-id,x-claude-code-session-id,x-session-affinity,session-id,session_id,x-litellm-session-id,x-smg-routing-key" doc:"Request headers that name a session, the first one present wins. After them the body's prompt_cache_key, then a hash of model, system prompt, tools and the first user turn."`
	Idle    time.Duration `yaml:"idle" default:"10m" range:"1s..24h" doc:"A session without a request for this long is forgotten."`
}

// Tokens sets how prompts are counted.
type Tokens struct {
	Default  string            `yaml:"default" default:"o200k_base" enum:"cl100k_base|o200k_base|o200k_harmony" doc:"Encoding for models whose own is not known."`
	Models   map[string]string `yaml:"models" enum:"cl100k_base|o200k_base|o200k_harmony" doc:"Model name, or prefix ending in *, to encoding. Before the built-in names."`
	MaxBytes Size              `yaml:"max_bytes" default:"256KiB" range:"4KiB..1GiB" doc:"Bytes of one prompt that are encoded; a longer prompt is estimated from so many of its bytes."`
}

// Log is the daemon's own log.
type Log struct {
	Level  string `yaml:"level" default:"info" enum:"debug|info|warn|error" doc:"Least level that is written."`
	Format string `yaml:"format" default:"auto" enum:"auto|text|json" doc:"auto: text on a terminal, JSON otherwise."`
}

// Words of Config.Credentials.
const (
	CredentialsAuto  = "auto"
	CredentialsStrip = "strip"
	CredentialsPass  = "pass"
)

// KeyFromEnv begins a Pool.KeyFrom that names an environment variable.
const KeyFromEnv = "env:"

// Words of Steering.
const (
	ModeOff      = "off"
	ModeNAT      = "nat"
	ModeDSR      = "dsr"
	TargetPeer   = "peer"
	TargetEngine = "engine"
	HandoffClose = "close"
)

// Steering is the kernel path.
type Steering struct {
	Mode         string         `yaml:"mode" default:"off" enum:"off|nat|dsr" doc:"off: everything passes through user space. nat: the kernel rewrites addresses both ways. dsr: packets go to backends on the same network as they are; these have the vip on lo without announcing it (arp_ignore 1, arp_announce 2), listen on its port, and answer clients directly. The vip must not be this host's only address, nor one that it uses as a source (IPv6: preferred_lft 0)."`
	Target       string         `yaml:"target" default:"peer" enum:"peer|engine" doc:"Where steered connections go. peer: to the shunt on the backend's host (its steer address). engine: to the engine itself; nothing that the front end does applies on them: every path of the engine is open, and there is no request id, access log or usage."`
	Interfaces   []string       `yaml:"interfaces" doc:"Every network interface on which clients or backends are reached. Required unless mode is off."`
	VIP          []netip.Addr   `yaml:"vip" doc:"Address, or list of addresses, of listen that clients use. Required when listen is 0.0.0.0 or ::."`
	SNAT         []netip.Addr   `yaml:"snat" doc:"Source address towards the backends, at most one a family. The VIP itself when left out."`
	NATPorts     PortRange      `yaml:"nat_ports" default:"20000-32767" doc:"Source ports towards the backends, with mode nat. Disjoint from session_ports, from the listeners and, but for net.ipv4.ip_local_reserved_ports, from the host's net.ipv4.ip_local_port_range."`
	SessionPorts PortRange      `yaml:"session_ports" doc:"Ports of pin endpoint, which is not in this release."`
	Pin          string         `yaml:"pin" default:"client" enum:"client|endpoint|connect" doc:"What the kernel takes for a session. client: an address, as long as all its sessions live on one backend. endpoint and connect are not in this release."`
	Handoff      string         `yaml:"handoff" default:"close" enum:"close|keep" doc:"close: an answer that pins its session asks the client to reconnect, and the next request is steered. keep: wait until the client opens a new connection by itself."`
	Lease        Lease          `yaml:"lease" doc:"How long a pin holds."`
	DrainLimit   time.Duration  `yaml:"drain_limit" default:"0s" range:"0s..168h" doc:"After this long in drain or maint, or after it was removed, a backend's open steered connections are ended with a RST; 0 = they run to their end."`
	Attach       string         `yaml:"attach" default:"auto" enum:"auto|xdp|xdp-generic|tcx" doc:"How the program is attached. auto: native XDP on network cards, tcx (Linux 6.6) on virtual devices, and where one of the two cannot be had the other. shunt status says which is live."`
	Require      bool           `yaml:"require" default:"false" doc:"true: refuse to start when the kernel path cannot be had. false: serve without it and say so in the log and in shunt status."`
	Ingress      []netip.Prefix `yaml:"ingress" doc:"Addresses of other shunts that steer connections here. What comes from them is served on this host's own backends and never steered again."`
	Instance     string         `yaml:"instance" default:"default" doc:"Name of the directory of pinned maps under the BPF file system; one for each shunt on a host."`
	BPFFS        string         `yaml:"bpffs" doc:"Directory of the BPF file system. Found or mounted when left out."`
	Bound        float64        `yaml:"bound" default:"1.25" range:"1.01..100" doc:"A backend may hold this multiple of its fair share of the pool's tokens before sessions spill and new connections are not steered to it."`
}

// Lease bounds a pin.
type Lease struct {
	Idle        time.Duration `yaml:"idle" default:"5m" range:"1s..24h" doc:"A pin that no connection used for this long is void."`
	Max         time.Duration `yaml:"max" default:"30m" range:"1s..168h" doc:"A pin older than this is void: the front end decides anew."`
	Connections int           `yaml:"connections" default:"64" range:"1..1000000" doc:"Connections that one pin serves."`
	Sample      int           `yaml:"sample" default:"16" range:"2..65536" doc:"One of so many connections of a pinned address passes to the front end, so that an address with several sessions shows itself."`
}
