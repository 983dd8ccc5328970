// The hint with which the kernels prefetch weights that a product reads once.
//
// On AMD's processors (Zen 4 and 5), they are prefetched as data that will not be used again. They then do not evict other
// data from the caches, which makes a whole decode of one request 8% faster. Intel's processors keep such data
// out of the second-level cache, and wait for fewer lines at a time: a Xeon (Emerald Rapids) reads memory at 11 GB/s this
// way, and at 28 GB/s through that cache. Processors of other vendors have not been measured.

#pragma once

#if defined(AMD)  // set by compiled.py
constexpr int PREFETCH_ONCE = 0;  // PREFETCHNTA
#else
constexpr int PREFETCH_ONCE = 2;  // PREFETCHT1
#endif
constexpr int PREFETCH_OFTEN = 3;  // PREFETCHT0: into all caches
