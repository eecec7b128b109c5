// SPDX-License-Identifier: Apache-2.0

// Package deploy holds what runs shunt on machines: a systemd unit, a container build file, Kubernetes manifests and
// Prometheus alerts. It has no code; its tests check each of them as far as that can be done without those systems.
package deploy
