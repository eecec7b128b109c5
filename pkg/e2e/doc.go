// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the real binaries in network namespaces, as users run them: no mocks. The tests take the binaries
// from SHUNT_BIN and SHUNTSIM_BIN (make test sets them) or build them. What a machine cannot do is skipped with the
// reason; with SHUNT_REQUIRE_ALL=1 a skip is a failure.
package e2e
