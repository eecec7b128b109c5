// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"

	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Diagnose looks at what the kernel path needs on this machine. Without a configuration it looks at the machine alone.
func Diagnose(ctx context.Context, cfg *config.Config) []datapath.Finding {
	if cfg == nil {
		return datapath.Diagnose(ctx, datapath.Options{}, nil)
	}
	var backends []datapath.BackendRecord
	id := fleet.ID(0)
	for _, p := range cfg.Pools {
		for _, b := range p.Backends {
			id++
			steer := b.Steer
			if cfg.Steering.Target == config.TargetEngine {
				steer, _ = b.Addr()
			}
			backends = append(backends, datapath.BackendRecord{ID: id, Name: b.Name, Steer: steer})
		}
	}
	return datapath.Diagnose(ctx, kernelOptions(cfg), backends)
}
