/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which connections of a pinned address pass to the L7, so that a second session behind the address shows itself.
 *
 * Each window of `every` connections has one sample at a random place, so each connection is a sample with probability
 * 1/every. The parity of the sample's place in the whole sequence alternates from window to window: two sessions that
 * strictly take turns both meet a sample within two windows, whatever the random numbers are.
 *
 * In the first window the first few places are spared: a short conversation of an address that has just been pinned is
 * steered throughout.
 */
#ifndef SHUNT_SAMPLE_H
#define SHUNT_SAMPLE_H

#include "abi.h"

enum { SAMPLE_SPARED = 4 };

static __always_inline __u32 sample_mix(__u32 x)
{
	x ^= x >> 16;
	x *= 0x85ebca6b;
	x ^= x >> 13;
	x *= 0xc2b2ae35;
	x ^= x >> 16;
	return x;
}

/* Below bound, from a random word. */
static __always_inline __u32 sample_scale(__u32 random, __u32 bound)
{
	return ((__u64)random * bound) >> 32;
}

static __always_inline int sample_hit(__u32 seed, __u32 n, __u32 every)
{
	if (!every)
		return 0;

	__u32 window = n / every, place = n - window * every, odd = every & 1;
	/* With odd windows there is one more place of one parity than of the other: the first parity is drawn in
	 * that proportion, which keeps all places equally likely. */
	__u32 first = sample_scale(sample_mix(seed ^ 0x9e3779b9), 2 * every) >= every + odd;
	__u32 parity = odd ? first : (first + window) & 1; /* of the place; an odd window turns it round by itself */
	__u32 places = (every + (parity ? 0 : odd)) / 2;

	__u32 pick = 2 * sample_scale(sample_mix(seed + window * 0x85ebca77), places) + parity;
	__u32 spared = every >= 4 * SAMPLE_SPARED ? SAMPLE_SPARED : every >= 2 * SAMPLE_SPARED ? SAMPLE_SPARED / 2 : 0;

	if (!window && pick < spared)
		pick += spared; /* of the same parity */
	return place == pick;
}

#endif
