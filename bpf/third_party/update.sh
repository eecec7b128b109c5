#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
# Copies the libbpf headers that the programs need from an installed libbpf-dev (Debian 12: 1.1.2-0+deb12u1), or from
# the include directory given. They are pinned here so that the object's bytes do not depend on what is installed.
set -eu
from=${1:-/usr/include}
cd "$(dirname "$0")"
for h in bpf_helpers.h bpf_helper_defs.h bpf_endian.h; do
	cp "$from/bpf/$h" "bpf/$h"
done
