// One launch: threadgroups one after the other, their threads as fibers, run until they wait and released together.
#pragma once
#include <algorithm>

#include "memory.h"

extern "C" struct MslemuLaunch {
  uint32_t grid[3], threadgroup[3];
  void** arguments;
  MslemuBuffer* buffers;
  uint32_t n_buffers, schedule, simd_order, check;
  uint64_t seed;
  char* report;
  uint64_t report_size;
  uint64_t threadgroup_bytes, barriers, accesses;  // out
};

namespace mslemu {

constexpr size_t kThreadgroupLimit = 32768;
constexpr size_t kGap = 64 * 1024;  // on both sides of a threadgroup variable, so that an index too far hits nothing
enum Schedule { kForward, kReverse, kShuffled };

struct Simdgroup {
  unsigned mask;
  alignas(16) char values[32][16];
};

struct Variable {
  char* base;
  size_t size;
  Cell* cells;
};

struct Run {
  MslemuLaunch* launch = nullptr;
  Memory memory;
  Sites sites;
  Report report;
  std::vector<Fiber*> fibers;  // kept from launch to launch
  std::vector<Variable> variables;
  Simdgroup simdgroups[32];
  uint64_t random = 1;
  void* main_sp = nullptr;
  int current = -1;
  uint32_t n = 0, threadgroup = 0;
  size_t threadgroup_bytes = 0;
  bool stopped = false;

  void leave(State state) {
    Fiber* f = fibers[current];
    f->state = state;
    mslemu_switch(&f->sp, main_sp);
  }
  void wait(State state, MslemuCall call, unsigned flags) {
    fibers[current]->call = call;
    fibers[current]->flags = flags;
    leave(state);
  }

  void allocate(Variable& v, size_t size, size_t item, const char* name);
  int all(MslemuLaunch* l);

 private:
  void enter(uint32_t i);
  void place(const uint32_t (&group)[3], const uint32_t (&groups)[3], const uint32_t (&nominal)[3]);
  void one_threadgroup();
  bool release_simdgroups();
  bool release_barrier();
  void diverged(const Fiber* a, const Fiber* b);
  std::vector<uint32_t> order(uint32_t count);
  void open(MslemuLaunch* l);
  void close();
};

inline Run* the_run;  // the fiber's first function takes no argument

inline void fiber_main() {
  Run* run = the_run;
  mslemu_entry(run->launch->arguments, &run->fibers[run->current]->place);
  for (;;) run->leave(kDone);
}

inline void Run::enter(uint32_t i) {
  current = int(i);
  mslemu_switch(&main_sp, fibers[i]->sp);
  current = -1;
}

inline std::vector<uint32_t> Run::order(uint32_t count) {
  std::vector<uint32_t> result(count);
  for (uint32_t i = 0; i < count; ++i) result[i] = launch->schedule == kReverse ? count - 1 - i : i;
  for (uint32_t left = count; launch->schedule == kShuffled && left > 1; --left) {
    random = random * 6364136223846793005u + 1442695040888963407u;  // Knuth's: one seed, one order, on every system
    std::swap(result[left - 1], result[(random >> 33) % left]);
  }
  return result;
}

inline void Run::allocate(Variable& v, size_t size, size_t item, const char* name) {
  v = {reserve(size + 2 * kGap) + kGap, size, reinterpret_cast<Cell*>(reserve(size * sizeof(Cell)))};
  memset(v.base, 0xFF, size);
  memory.regions.push_back({name, uintptr_t(v.base), size, item, true, false, kThreadgroup, v.cells, 1});
  threadgroup_bytes += (size + 15) / 16 * 16;
}

inline void describe(const Fiber* f, char (&out)[320]) {
  const unsigned i = f->place.thread_index_in_threadgroup;
  if (f->state == kDone) snprintf(out, sizeof out, "thread %u has returned", i);
  else snprintf(out, sizeof out, "thread %u waits in %s at %s:%u", i, f->call.what, f->call.file, f->call.line);
}

inline void Run::diverged(const Fiber* a, const Fiber* b) {
  char where[256], first[320], second[320];
  describe(a, first);
  describe(b, second);
  sites.text(sites.of(a->call), where);
  report.add("divergence", where, "in threadgroup %u %s while %s", threadgroup, first, second);
  stopped = true;
}

inline bool same_call(const Fiber* a, const Fiber* b) {
  return a->state == b->state && a->call.line == b->call.line && !strcmp(a->call.what, b->call.what) &&
         !strcmp(a->call.file, b->call.file);
}

// A SIMD-group goes on when all its lanes that haven't returned wait in the same call.
inline bool Run::release_simdgroups() {
  bool released = false;
  for (uint32_t begin = 0; begin < n; begin += 32) {
    const uint32_t end = std::min(n, begin + 32);
    const auto at_simd = [](const Fiber* f) { return f->state == kAtSimd; };
    const auto first = std::find_if(fibers.begin() + begin, fibers.begin() + end, at_simd);
    if (first == fibers.begin() + end) continue;
    const auto elsewhere = [&](const Fiber* f) { return f->state != kDone && !same_call(f, *first); };
    const auto odd = std::find_if(fibers.begin() + begin, fibers.begin() + end, elsewhere);
    if (odd != fibers.begin() + end) return diverged(*first, *odd), false;
    Simdgroup& group = simdgroups[begin / 32];
    group.mask = 0;
    const unsigned flags = (*first)->flags;
    for (int space : {kDevice, kThreadgroup}) memory.simd_epoch[space][begin / 32] += flags >> space & 1;
    for (uint32_t i = begin; i < end; ++i) {
      Fiber* f = fibers[i];
      if (f->state == kDone) continue;
      group.mask |= 1u << (i & 31);
      memcpy(group.values[i & 31], f->value, f->size);
      f->state = kReady;
    }
    released = true;
  }
  return released;
}

// A threadgroup goes on when all its threads wait at the same barrier. One that has returned never will.
inline bool Run::release_barrier() {
  const auto begin = fibers.begin(), end = begin + n;
  const auto first = std::find_if(begin, end, [](const Fiber* f) { return f->state == kAtBarrier; });
  if (first == end) return false;
  const auto odd = std::find_if(begin, end, [&](const Fiber* f) { return !same_call(f, *first); });
  if (odd != end) return diverged(*first, *odd), false;
  for (int space : {kDevice, kThreadgroup}) memory.epoch[space] += (*first)->flags >> space & 1;
  ++launch->barriers;
  std::for_each(begin, end, [](Fiber* f) { f->state = kReady; });
  return true;
}

inline void Run::one_threadgroup() {
  for (Variable& v : variables) {
    if (!v.cells) continue;
    memset(v.base, 0xFF, v.size);  // NaN: what the threadgroup before left here is nobody's
    memset(static_cast<void*>(v.cells), 0, v.size * sizeof(Cell));
  }
  do {
    for (uint32_t i : order(n)) {
      if (fibers[i]->state == kReady) enter(i);
      if (stopped) return;
    }
  } while (release_simdgroups() || (!stopped && release_barrier()));
}

inline MslemuUint3 triple(const uint32_t (&a)[3]) { return {a[0], a[1], a[2]}; }

// Makes the threads of one threadgroup. At the grid's edges it is smaller than asked for, as dispatchThreads makes it.
inline void Run::place(const uint32_t (&group)[3], const uint32_t (&groups)[3], const uint32_t (&nominal)[3]) {
  uint32_t size[3];
  for (int d = 0; d < 3; ++d) size[d] = std::min(nominal[d], launch->grid[d] - group[d] * nominal[d]);
  n = size[0] * size[1] * size[2];
  const uint32_t asked = nominal[0] * nominal[1] * nominal[2];
  while (fibers.size() < n) {
    fibers.push_back(new Fiber());
    fibers.back()->stack = reserve(kStack);
  }
  for (uint32_t i = 0; i < n; ++i) {
    Fiber* f = fibers[i];
    const uint32_t at[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    MslemuPlace& p = f->place = MslemuPlace{};
    p.dispatch_threads_per_threadgroup = triple(nominal);
    p.grid_size = p.threads_per_grid = triple(launch->grid);
    p.thread_position_in_threadgroup = triple(at);
    const uint32_t from[3] = {group[0] * nominal[0], group[1] * nominal[1], group[2] * nominal[2]};
    p.thread_position_in_grid = {from[0] + at[0], from[1] + at[1], from[2] + at[2]};
    p.threadgroup_position_in_grid = triple(group);
    p.threadgroups_per_grid = triple(groups);
    p.threads_per_threadgroup = triple(size);
    p.dispatch_quadgroups_per_threadgroup = (asked + 3) / 4;
    p.dispatch_simdgroups_per_threadgroup = (asked + 31) / 32;
    p.quadgroup_index_in_threadgroup = i / 4;
    p.quadgroups_per_threadgroup = (n + 3) / 4;
    p.simdgroup_index_in_threadgroup = i / 32;
    p.simdgroups_per_threadgroup = (n + 31) / 32;
    p.thread_index_in_quadgroup = i % 4;
    p.thread_index_in_simdgroup = i % 32;
    p.thread_index_in_threadgroup = i;
    p.thread_execution_width = p.threads_per_simdgroup = 32;
    f->sp = first_frame(f->stack + kStack, fiber_main);
    f->state = kReady;
  }
}

inline void Run::open(MslemuLaunch* l) {
  the_run = this;
  launch = l;
  memory = Memory{};
  report = Report{};
  report.text = l->report;
  report.size = l->report_size;
  variables.clear();
  threadgroup_bytes = 0;
  stopped = false;
  random = l->seed;
  for (uint32_t i = 0; i < l->n_buffers; ++i) {
    const MslemuBuffer& b = l->buffers[i];
    Cell* cells = nullptr;
    if (b.writable && l->check) cells = reinterpret_cast<Cell*>(reserve((b.size / b.item + 1) * sizeof(Cell)));
    memory.regions.push_back({b.name, uintptr_t(b.base), size_t(b.size), size_t(b.item), b.writable != 0,
                              b.initialised != 0, kDevice, cells, size_t(b.item)});
  }
}

inline void Run::close() {
  launch->threadgroup_bytes = threadgroup_bytes;
  launch->accesses = memory.accesses;
  for (Variable& v : variables)
    if (v.cells) munmap(v.base - kGap, v.size + 2 * kGap);
  for (Region& r : memory.regions)
    if (r.cells) munmap(r.cells, (r.size / r.unit + (r.space == kDevice)) * sizeof(Cell));
  launch = nullptr;
}

inline int Run::all(MslemuLaunch* l) {
  open(l);
  uint32_t nominal[3], groups[3];
  for (int d = 0; d < 3; ++d) {
    nominal[d] = std::min(l->threadgroup[d], l->grid[d]);
    groups[d] = (l->grid[d] + nominal[d] - 1) / nominal[d];
  }
  for (uint32_t t : order(groups[0] * groups[1] * groups[2])) {
    threadgroup = t;
    place({t % groups[0], t / groups[0] % groups[1], t / groups[0] / groups[1]}, groups, nominal);
    one_threadgroup();
    if (stopped) break;
  }
  close();
  return int(report.faults);
}

}  // namespace mslemu
