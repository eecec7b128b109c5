// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/shunt-lb/shunt/pkg/config"
)

// The types below are the part of the Kubernetes API that the manifests use. Decoding is strict, so a key that is not
// here, or in the wrong place, is an error.

type metadata struct {
	Name        string            `yaml:"name"`
	Namespace   string            `yaml:"namespace"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

type namespace struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
}

type configMap struct {
	APIVersion string            `yaml:"apiVersion"`
	Kind       string            `yaml:"kind"`
	Metadata   metadata          `yaml:"metadata"`
	Data       map[string]string `yaml:"data"`
}

type daemonSet struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
	Spec       struct {
		Selector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		} `yaml:"selector"`
		UpdateStrategy struct {
			Type          string `yaml:"type"`
			RollingUpdate struct {
				MaxSurge       int `yaml:"maxSurge"`
				MaxUnavailable int `yaml:"maxUnavailable"`
			} `yaml:"rollingUpdate"`
		} `yaml:"updateStrategy"`
		Template struct {
			Metadata metadata `yaml:"metadata"`
			Spec     podSpec  `yaml:"spec"`
		} `yaml:"template"`
	} `yaml:"spec"`
}

type podSpec struct {
	HostNetwork                   bool                `yaml:"hostNetwork"`
	DNSPolicy                     string              `yaml:"dnsPolicy"`
	AutomountServiceAccountToken  *bool               `yaml:"automountServiceAccountToken"`
	PriorityClassName             string              `yaml:"priorityClassName"`
	NodeSelector                  map[string]string   `yaml:"nodeSelector"`
	Tolerations                   []map[string]string `yaml:"tolerations"`
	TerminationGracePeriodSeconds int                 `yaml:"terminationGracePeriodSeconds"`
	InitContainers                []container         `yaml:"initContainers"`
	Containers                    []container         `yaml:"containers"`
	Volumes                       []volume            `yaml:"volumes"`
}

type container struct {
	Name            string   `yaml:"name"`
	Image           string   `yaml:"image"`
	ImagePullPolicy string   `yaml:"imagePullPolicy"`
	Command         []string `yaml:"command"`
	Args            []string `yaml:"args"`
	Ports           []struct {
		Name          string `yaml:"name"`
		ContainerPort uint16 `yaml:"containerPort"`
		HostPort      uint16 `yaml:"hostPort"`
		Protocol      string `yaml:"protocol"`
	} `yaml:"ports"`
	StartupProbe   *probe `yaml:"startupProbe"`
	LivenessProbe  *probe `yaml:"livenessProbe"`
	ReadinessProbe *probe `yaml:"readinessProbe"`
	Resources      struct {
		Requests map[string]string `yaml:"requests"`
		Limits   map[string]string `yaml:"limits"`
	} `yaml:"resources"`
	SecurityContext struct {
		RunAsUser                int   `yaml:"runAsUser"`
		Privileged               bool  `yaml:"privileged"`
		AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
		ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		Capabilities             struct {
			Drop []string `yaml:"drop"`
			Add  []string `yaml:"add"`
		} `yaml:"capabilities"`
		SeccompProfile struct {
			Type string `yaml:"type"`
		} `yaml:"seccompProfile"`
	} `yaml:"securityContext"`
	VolumeMounts []volumeMount `yaml:"volumeMounts"`
}

type volumeMount struct {
	Name             string `yaml:"name"`
	MountPath        string `yaml:"mountPath"`
	ReadOnly         bool   `yaml:"readOnly"`
	MountPropagation string `yaml:"mountPropagation"`
}

func (c container) mount(name string) volumeMount {
	i := slices.IndexFunc(c.VolumeMounts, func(m volumeMount) bool { return m.Name == name })
	if i < 0 {
		return volumeMount{}
	}
	return c.VolumeMounts[i]
}

type probe struct {
	HTTPGet struct {
		Port string `yaml:"port"`
		Path string `yaml:"path"`
	} `yaml:"httpGet"`
	PeriodSeconds    int `yaml:"periodSeconds"`
	TimeoutSeconds   int `yaml:"timeoutSeconds"`
	FailureThreshold int `yaml:"failureThreshold"`
}

type volume struct {
	Name      string `yaml:"name"`
	ConfigMap *struct {
		Name string `yaml:"name"`
	} `yaml:"configMap"`
	EmptyDir *struct{} `yaml:"emptyDir"`
	HostPath *struct {
		Path string `yaml:"path"`
		Type string `yaml:"type"`
	} `yaml:"hostPath"`
}

// documents decodes each YAML document of a file strictly into the next of the given values.
func documents(t *testing.T, path string, into ...any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	dec := yaml.NewDecoder(bytes.NewReader(b), yaml.Strict())
	for _, v := range into {
		if err := dec.Decode(v); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	var more any
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		t.Fatalf("%s holds more than %d documents", path, len(into))
	}
}

func manifests(t *testing.T) (ns namespace, cm configMap) {
	t.Helper()
	documents(t, "kubernetes/config.yaml", &ns, &cm)
	return ns, cm
}

func TestNamespaceAndConfigMap(t *testing.T) {
	ns, cm := manifests(t)
	if ns.APIVersion != "v1" || ns.Kind != "Namespace" || cm.APIVersion != "v1" || cm.Kind != "ConfigMap" {
		t.Errorf("kinds are %s %s and %s %s", ns.APIVersion, ns.Kind, cm.APIVersion, cm.Kind)
	}
	if cm.Metadata.Namespace != ns.Metadata.Name {
		t.Errorf("the ConfigMap is in namespace %q, want %q", cm.Metadata.Namespace, ns.Metadata.Name)
	}
	// Without it the admission of most clusters refuses host network and host paths.
	if got := ns.Metadata.Labels["pod-security.kubernetes.io/enforce"]; got != "privileged" {
		t.Errorf("pod security level is %q, want privileged", got)
	}
}

// daemonSets are the two variants; only one is applied.
var daemonSets = []struct {
	file       string
	privileged bool
}{
	{"kubernetes/daemonset.yaml", false},
	{"kubernetes/daemonset-privileged.yaml", true},
}

func TestDaemonSets(t *testing.T) {
	ns, cm := manifests(t)
	for _, tt := range daemonSets {
		t.Run(filepath.Base(tt.file), func(t *testing.T) {
			var ds daemonSet
			documents(t, tt.file, &ds)
			if ds.APIVersion != "apps/v1" || ds.Kind != "DaemonSet" || ds.Metadata.Namespace != ns.Metadata.Name {
				t.Errorf("is %s %s in %q", ds.APIVersion, ds.Kind, ds.Metadata.Namespace)
			}
			for k, v := range ds.Spec.Selector.MatchLabels {
				if ds.Spec.Template.Metadata.Labels[k] != v {
					t.Errorf("selector wants %s=%s, the pods have %q", k, v, ds.Spec.Template.Metadata.Labels[k])
				}
			}
			if u := ds.Spec.UpdateStrategy; u.Type != "RollingUpdate" || u.RollingUpdate.MaxSurge != 0 || u.RollingUpdate.MaxUnavailable < 1 {
				t.Errorf("update strategy %+v: two pods cannot share a host's port", u)
			}
			pod := ds.Spec.Template.Spec
			if !pod.HostNetwork || pod.DNSPolicy != "ClusterFirstWithHostNet" {
				t.Errorf("host network %v with DNS policy %q", pod.HostNetwork, pod.DNSPolicy)
			}
			if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
				t.Error("mounts a service account token, which nothing uses")
			}
			if len(pod.Containers) != 1 {
				t.Fatalf("%d containers, want 1", len(pod.Containers))
			}
			c := pod.Containers[0]
			checkPorts(t, c, cm)
			checkVolumes(t, pod, c, cm)
			checkSecurity(t, c, tt.privileged)
			checkInit(t, pod.InitContainers, tt.privileged)
		})
	}
}

// checkPorts compares the container's ports and probes with the configuration that it serves from.
func checkPorts(t *testing.T, c container, cm configMap) {
	t.Helper()
	cfg := parse(t, "shunt.yaml", cm.Data["shunt.yaml"], config.Host{})
	want := map[string]uint16{"http": cfg.Listen.Port(), "admin": cfg.Admin.Listen.Port()}
	for _, p := range c.Ports {
		if want[p.Name] != p.ContainerPort || p.HostPort != p.ContainerPort || p.Protocol != "TCP" {
			t.Errorf("port %+v, want %d on pod and host", p, want[p.Name])
		}
		delete(want, p.Name)
	}
	if len(want) > 0 {
		t.Errorf("ports are missing: %v", want)
	}
	if cfg.Admin.Listen.Addr().IsLoopback() {
		t.Error("the kubelet and Prometheus ask the node's address, which the admin listener is not on")
	}
	for name, p := range map[string]*probe{"startup": c.StartupProbe, "liveness": c.LivenessProbe, "readiness": c.ReadinessProbe} {
		path := "/healthz"
		if name == "readiness" {
			path = "/readyz"
		}
		switch {
		case p == nil:
			t.Errorf("no %s probe", name)
		case p.HTTPGet.Port != "admin" || p.HTTPGet.Path != path:
			t.Errorf("%s probe asks %+v, want %s at the admin port", name, p.HTTPGet, path)
		case p.PeriodSeconds == 0 || p.FailureThreshold == 0:
			t.Errorf("%s probe has no period or threshold", name)
		}
	}
}

// checkVolumes follows each mount to its volume, and the paths of the arguments and the configuration to a mount.
func checkVolumes(t *testing.T, pod podSpec, c container, cm configMap) {
	t.Helper()
	vols := map[string]volume{}
	for _, v := range pod.Volumes {
		vols[v.Name] = v
	}
	mounted := map[string]string{}
	for _, m := range c.VolumeMounts {
		if _, ok := vols[m.Name]; !ok {
			t.Errorf("mount %s has no volume", m.Name)
		}
		mounted[m.MountPath] = m.Name
		delete(vols, m.Name)
	}
	if len(vols) > 0 {
		t.Errorf("volumes are not mounted: %v", vols)
	}
	for _, v := range pod.Volumes {
		switch {
		case v.ConfigMap != nil && v.ConfigMap.Name != cm.Metadata.Name:
			t.Errorf("volume %s wants ConfigMap %q, want %q", v.Name, v.ConfigMap.Name, cm.Metadata.Name)
		case v.HostPath != nil && mounted[v.HostPath.Path] != v.Name:
			t.Errorf("volume %s is the host's %s, mounted elsewhere", v.Name, v.HostPath.Path)
		}
	}
	i := slices.Index(c.Args, "--config")
	if i < 0 || i+1 >= len(c.Args) {
		t.Fatalf("args %q name no configuration", c.Args)
	}
	dir, file := filepath.Split(c.Args[i+1])
	if mounted[filepath.Clean(dir)] != "config" || cm.Data[file] == "" {
		t.Errorf("--config %s is not in the ConfigMap", c.Args[i+1])
	}
	for name, text := range cm.Data {
		cfg := parse(t, name, text, config.Host{})
		if s := cfg.Admin.Socket; s != "" && mounted[filepath.Dir(s)] == "" {
			t.Errorf("%s: socket %s is on the read-only root", name, s)
		}
		if b := cfg.Steering.BPFFS; b != "" && mounted[b] != "bpffs" {
			t.Errorf("%s: bpffs %s is not mounted", name, b)
		}
	}
}

func checkSecurity(t *testing.T, c container, privileged bool) {
	t.Helper()
	s := c.SecurityContext
	if m := c.mount("bpffs"); m.MountPropagation != "HostToContainer" || m.ReadOnly {
		t.Errorf("bpffs is mounted as %+v", m)
	}
	if s.Privileged != privileged || !s.ReadOnlyRootFilesystem || s.RunAsUser != 0 {
		t.Errorf("security context %+v", s)
	}
	if privileged {
		return
	}
	if s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.SeccompProfile.Type != "RuntimeDefault" {
		t.Errorf("security context %+v", s)
	}
	if !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) {
		t.Errorf("drops %q, want ALL", s.Capabilities.Drop)
	}
	var got []string
	for _, name := range s.Capabilities.Add {
		got = append(got, "CAP_"+name)
	}
	want := slices.DeleteFunc(unitCapabilities(t), func(name string) bool { return name == "CAP_NET_BIND_SERVICE" })
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("adds %q, the systemd unit has %q", got, want)
	}
}

// checkInit looks at who mounts the BPF file system. The daemon refuses to: in its own mount namespace the pins would
// die with the pod. Only a privileged container can do it on the node.
func checkInit(t *testing.T, init []container, privileged bool) {
	t.Helper()
	if !privileged {
		if len(init) > 0 {
			t.Errorf("has %d init containers, want none", len(init))
		}
		return
	}
	if len(init) != 1 {
		t.Fatalf("has %d init containers, want 1", len(init))
	}
	c := init[0]
	m := c.mount("bpffs")
	if !c.SecurityContext.Privileged || m.MountPropagation != "Bidirectional" ||
		!strings.HasSuffix(strings.Join(c.Command, " "), " "+m.MountPath) {
		t.Errorf("init container runs %q with %+v", c.Command, m)
	}
}

// parse reads one configuration as the daemon would, on a host that has what it names.
func parse(t *testing.T, name, text string, host config.Host) *config.Config {
	t.Helper()
	cfg, err := config.Parse(name, []byte(text))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if err := cfg.Validate(host); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return cfg
}

// TestConfigSamples reads every configuration that is shipped here against a plain Linux host.
func TestConfigSamples(t *testing.T) {
	_, cm := manifests(t)
	unit, err := os.ReadFile("systemd/shunt.yaml")
	if err != nil {
		t.Fatal(err)
	}
	samples := map[string]string{"systemd/shunt.yaml": string(unit)}
	for name, text := range cm.Data {
		samples["kubernetes/"+name] = text
	}
	for name, text := range samples {
		t.Run(strings.ReplaceAll(name, "/", "_"), func(t *testing.T) {
			parse(t, name, text, config.Host{LocalPortRange: [2]int{32768, 60999}, Interfaces: []string{"lo", "eth0"}})
		})
	}
}
