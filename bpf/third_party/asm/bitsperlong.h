/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The generic form, so that the object does not depend on the machine that compiles it. */
#define __BITS_PER_LONG 64
#include <asm-generic/bitsperlong.h>
