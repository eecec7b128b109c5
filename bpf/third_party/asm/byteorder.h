/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The generic form, so that the object does not depend on the machine that compiles it. */
#include <linux/byteorder/little_endian.h>
