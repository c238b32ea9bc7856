// Every byte a kernel touches: which buffer it is in, who touched it last, and whether a barrier lies between.
//
// An access is ordered after another of the same threadgroup by a barrier that covers its address space, and within a
// SIMD-group also by a simdgroup_barrier. Nothing else orders two threads: not lockstep, not the order in which the
// emulator happens to run them.
#pragma once
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <vector>

#include "fiber.h"

extern "C" struct MslemuBuffer {
  const char* name;
  void* base;
  uint64_t size, item;
  int32_t writable, initialised;
};

namespace mslemu {

enum Space { kDevice, kThreadgroup };

struct Access {
  uint32_t who;  // 1 + 1024 * threadgroup + thread; 0: nobody
  uint32_t epoch;
  uint32_t simd_epoch : 31, atomic : 1;
  uint32_t site;
};

struct Cell {
  Access write, read, other_read;
};

struct Region {
  const char* name;
  uintptr_t base;
  size_t size, item;
  bool writable, initialised;
  Space space;
  Cell* cells;
  size_t unit;  // bytes that a cell stands for
};

struct Memory {
  std::vector<Region> regions;
  size_t last = 0;
  uint32_t epoch[2] = {1, 1};
  uint32_t simd_epoch[2][32] = {};
  uint64_t accesses = 0;
};

// A place in the kernel: an address in its code, or a file and a line where the shim knows them.
struct Sites {
  std::vector<MslemuCall> calls;
  uintptr_t base = 0;
  uint32_t of(uintptr_t pc) const { return uint32_t(pc - base); }
  uint32_t of(MslemuCall call) {
    for (size_t i = 0; i < calls.size(); ++i)
      if (calls[i].line == call.line && calls[i].file == call.file) return uint32_t(i) | 1u << 31;
    calls.push_back(call);
    return uint32_t(calls.size() - 1) | 1u << 31;
  }
  // "@address", which Python turns into the other form, or "file:line".
  const char* text(uint32_t site, char (&out)[256]) const {
    if (site >> 31) snprintf(out, sizeof out, "%s:%u", calls[site & ~(1u << 31)].file, calls[site & ~(1u << 31)].line);
    else snprintf(out, sizeof out, "@%x", site);
    return out;
  }
};

struct Report {
  char* text = nullptr;
  size_t size = 0, used = 0;
  unsigned faults = 0;
  std::vector<uint64_t> seen;

  bool fresh(uint64_t key) {
    for (uint64_t k : seen)
      if (k == key) return false;
    seen.push_back(key);
    return seen.size() <= 16;
  }
  __attribute__((format(printf, 4, 5))) void add(const char* kind, const char* where, const char* format, ...) {
    ++faults;
    if (used + 1024 > size) return;
    used += size_t(snprintf(text + used, 400, "%s\t%s\t", kind, where));
    va_list rest;
    va_start(rest, format);
    used += size_t(vsnprintf(text + used, 600, format, rest));
    va_end(rest);
    if (used > size - 2) used = size - 2;
    text[used++] = '\n';
    text[used] = 0;
  }
};

inline uint32_t thread_of(const Access& a) { return (a.who - 1) & 1023; }
inline uint32_t threadgroup_of(const Access& a) { return (a.who - 1) >> 10; }
inline bool same_simdgroup(const Access& a, const Access& b) { return (a.who - 1) >> 5 == (b.who - 1) >> 5; }

inline bool unordered(const Access& before, const Access& now) {
  if (!before.who || before.who == now.who || (before.atomic && now.atomic)) return false;
  if (threadgroup_of(before) != threadgroup_of(now)) return true;
  if (before.epoch != now.epoch) return false;
  return !same_simdgroup(before, now) || before.simd_epoch == now.simd_epoch;
}

// Two readers are enough to find a later writer's race, if they are of two SIMD-groups where there are two.
inline void note_read(Cell& cell, const Access& now) {
  const Access& other = cell.other_read;
  const bool keep = other.who && !same_simdgroup(other, now) &&
                    (threadgroup_of(other) != threadgroup_of(now) || other.epoch == now.epoch);
  if (cell.read.who != now.who && !(same_simdgroup(cell.read, now) && keep)) cell.other_read = cell.read;
  cell.read = now;
}

inline Region* find(Memory& m, uintptr_t address) {
  if (m.last < m.regions.size() && address - m.regions[m.last].base < m.regions[m.last].size) return &m.regions[m.last];
  for (size_t i = 0; i < m.regions.size(); ++i) {
    if (address - m.regions[i].base >= m.regions[i].size) continue;
    m.last = i;
    return &m.regions[i];
  }
  return nullptr;
}

inline const Region* nearest(const Memory& m, uintptr_t address) {
  const Region* best = nullptr;
  size_t distance = ~size_t(0);
  for (const Region& r : m.regions) {
    const size_t d = address < r.base ? r.base - address : address - r.base - r.size;
    if (d < distance) distance = d, best = &r;
  }
  return best;
}

// Constants of the kernel's own library, which it may read.
inline bool in_library(uintptr_t address, uintptr_t base) {
  Dl_info info;
  return dladdr(reinterpret_cast<void*>(address), &info) && reinterpret_cast<uintptr_t>(info.dli_fbase) == base;
}

}  // namespace mslemu
