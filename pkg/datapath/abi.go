// SPDX-License-Identifier: Apache-2.0

package datapath

// ABI is the version of the maps' layout (SHUNT_ABI in bpf/include/abi.h). Shunts that steer to each other need the
// same one.
const ABI = int(steerShuntSizesSHUNT_ABI)
