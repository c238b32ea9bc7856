// The runtime, compiled once and linked into each kernel: what a launch holds, the checks on each access, and the
// names that the compiler's instrumentation calls. The sanitizers' own libraries are never linked.
#include "runtime.h"

#include "memory.h"
#include "schedule.h"

using namespace mslemu;

namespace {

Run run;

[[noreturn]] void stop() {
  run.stopped = true;
  for (;;) run.leave(kDone);
}

Access access_now(Space space, uint32_t site, bool atomic) {
  const uint32_t thread = uint32_t(run.current);
  return {(run.threadgroup << 10 | thread) + 1, run.memory.epoch[space], run.memory.simd_epoch[space][thread / 32],
          atomic, site};
}

void report_out_of_bounds(uintptr_t address, size_t n, int access, const Region& r, const char* where) {
  const long byte = long(address) - long(r.base);
  run.report.add("out-of-bounds", where,
                 "%s of %zu bytes at byte %ld of '%s', which has %zu; thread %d of threadgroup %u",
                 access & MSLEMU_WRITE ? "write" : "read", n, byte, r.name, r.size, run.current, run.threadgroup);
}

void report_race(const Region& r, size_t byte, const Access& before, bool before_writes, const Access& now,
                 bool writes) {
  if (!run.report.fresh(uint64_t(now.site) << 32 | before.site)) return;
  char here[256], there[256];
  run.report.add("race", run.sites.text(now.site, here),
                 "'%s'[%zu] is %s by thread %u of threadgroup %u and %s by thread %u of threadgroup %u at %s, with no "
                 "barrier for %s memory between them",
                 r.name, byte / r.item, writes ? "written" : "read", thread_of(now), threadgroup_of(now),
                 before_writes ? "written" : "read", thread_of(before), threadgroup_of(before),
                 run.sites.text(before.site, there), r.space == kDevice ? "device" : "threadgroup");
}

void touch(const Region& r, size_t index, int access, const Access& now) {
  Cell& cell = r.cells[index];
  const size_t byte = index * r.unit;
  const bool writes = access & MSLEMU_WRITE;
  if ((access & MSLEMU_READ) && !r.initialised && !cell.write.who && run.report.fresh(uint64_t(now.site) << 32 | ~0u)) {
    char here[256];
    run.report.add("uninitialised", run.sites.text(now.site, here),
                   "'%s'[%zu] is read by thread %d of threadgroup %u and nobody wrote it", r.name, byte / r.item,
                   run.current, run.threadgroup);
  }
  if (unordered(cell.write, now)) report_race(r, byte, cell.write, true, now, writes);
  else if (writes && unordered(cell.read, now)) report_race(r, byte, cell.read, false, now, writes);
  else if (writes && unordered(cell.other_read, now)) report_race(r, byte, cell.other_read, false, now, writes);
  if (!writes) return note_read(cell, now);
  cell.write = now;
}

void check(uintptr_t address, size_t n, int access, uint32_t site, bool atomic = false) {
  if (!run.launch || run.current < 0 || !run.launch->check) return;
  if (address - uintptr_t(run.fibers[run.current]->stack) < kStack) return;
  ++run.memory.accesses;
  const Region* r = find(run.memory, address);
  if (!r && access == MSLEMU_READ && in_library(address, run.sites.base)) return;
  char here[256];
  if (!r || address + n > r->base + r->size) {
    report_out_of_bounds(address, n, access, r ? *r : *nearest(run.memory, address), run.sites.text(site, here));
    stop();
  }
  if ((access & MSLEMU_WRITE) && !r->writable) {
    run.report.add("write-to-input", run.sites.text(site, here),
                   "'%s' is an input; thread %d of threadgroup %u writes it", r->name, run.current, run.threadgroup);
    stop();
  }
  if (!r->cells) return;
  const Access now = access_now(r->space, site, atomic);
  const size_t first = (address - r->base) / r->unit, last = (address - r->base + n - 1) / r->unit;
  for (size_t i = first; i <= last; ++i) touch(*r, i, access, now);
}

void check_at(const void* address, size_t n, int access, void* pc) {
  // The call before the return address: of two statements on one line each has its own.
  check(uintptr_t(address), n, access, run.sites.of(uintptr_t(pc) - 1));
}

}  // namespace

extern "C" {

void mslemu_barrier(unsigned flags, MslemuCall call) { run.wait(kAtBarrier, call, flags); }

void mslemu_simd_barrier(unsigned flags, MslemuCall call) {
  run.fibers[run.current]->size = 0;
  run.wait(kAtSimd, call, flags);
}

unsigned mslemu_gather(const void* value, void* lanes, unsigned size, MslemuCall call) {
  Fiber* f = run.fibers[run.current];
  memcpy(f->value, value, size);
  f->size = size;
  run.wait(kAtSimd, call, 0);
  const Simdgroup& group = run.simdgroups[run.current / 32];
  for (int i = 0; i < 32; ++i) memcpy(static_cast<char*>(lanes) + i * size, group.values[i], size);
  return group.mask;
}

unsigned mslemu_lane() { return unsigned(run.current) & 31; }
unsigned mslemu_simd_order() { return run.launch->simd_order; }

void mslemu_inactive_lane(unsigned lane, MslemuCall call) {
  const uint32_t site = run.sites.of(call);
  if (!run.report.fresh(uint64_t(site) << 32 | ~1u)) return;
  char here[256];
  run.report.add("inactive-lane", run.sites.text(site, here),
                 "%s by thread %d of threadgroup %u reads lane %u, which takes no part", call.what, run.current,
                 run.threadgroup, lane);
}

void* mslemu_threadgroup(unsigned index, unsigned long size, unsigned long item, const char* name, MslemuCall call) {
  char here[256];
  if (run.variables.size() <= index) run.variables.resize(index + 1, {});
  Variable& v = run.variables[index];
  if (!v.cells) run.allocate(v, size, item, name);
  if (run.threadgroup_bytes > kThreadgroupLimit) {
    run.report.add("threadgroup-memory", run.sites.text(run.sites.of(call), here),
                   "'%s' makes it %zu bytes, and a threadgroup has %zu", name, run.threadgroup_bytes,
                   kThreadgroupLimit);
    stop();
  }
  return v.base;
}

void mslemu_atomic(const volatile void* address, unsigned size, MslemuAccess access, MslemuCall call) {
  check(uintptr_t(address), size, access, run.sites.of(call), true);
}

__attribute__((visibility("default"))) int mslemu_launch(MslemuLaunch* launch) {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&mslemu_launch), &self);
  run.sites.base = uintptr_t(self.dli_fbase);
  return run.all(launch);
}

// -fsanitize=thread
#define PC __builtin_return_address(0)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define MSLEMU_ACCESS(name, n, access) \
  void __tsan_##name##n(void* p) { check_at(p, n, access, PC); }
#define MSLEMU_ACCESSES(n)                                                                              \
  MSLEMU_ACCESS(read, n, MSLEMU_READ) MSLEMU_ACCESS(write, n, MSLEMU_WRITE)                             \
  MSLEMU_ACCESS(read_write, n, MSLEMU_BOTH) MSLEMU_ACCESS(unaligned_read, n, MSLEMU_READ)               \
  MSLEMU_ACCESS(unaligned_write, n, MSLEMU_WRITE) MSLEMU_ACCESS(unaligned_read_write, n, MSLEMU_BOTH)   \
  MSLEMU_ACCESS(volatile_read, n, MSLEMU_READ) MSLEMU_ACCESS(volatile_write, n, MSLEMU_WRITE)           \
  MSLEMU_ACCESS(unaligned_volatile_read, n, MSLEMU_READ) MSLEMU_ACCESS(unaligned_volatile_write, n, MSLEMU_WRITE)
MSLEMU_ACCESSES(1) MSLEMU_ACCESSES(2) MSLEMU_ACCESSES(4) MSLEMU_ACCESSES(8) MSLEMU_ACCESSES(16)
void __tsan_read_range(void* p, unsigned long n) { check_at(p, n, MSLEMU_READ, PC); }
void __tsan_write_range(void* p, unsigned long n) { check_at(p, n, MSLEMU_WRITE, PC); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  check_at(from, n, MSLEMU_READ, PC);
  check_at(to, n, MSLEMU_WRITE, PC);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  check_at(from, n, MSLEMU_READ, PC);
  check_at(to, n, MSLEMU_WRITE, PC);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  check_at(to, n, MSLEMU_WRITE, PC);
  return memset(to, value, n);
}

// -fsanitize=undefined: each handler's first argument begins with the place
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
static void undefined(const char* kind, const char* what, const SourceLocation* at) {
  const uint32_t site = run.sites.of(MslemuCall{what, at->file, at->line});
  if (!run.launch || !run.report.fresh(uint64_t(site) << 32 | 1u << 30 | at->column)) return;
  char here[256];
  run.report.add(kind, run.sites.text(site, here), "%s; thread %d of threadgroup %u", what, run.current,
                 run.threadgroup);
}
#define MSLEMU_UNDEFINED(name, kind, what) \
  void __ubsan_handle_##name(SourceLocation* at, ...) { undefined(kind, what, at); }
MSLEMU_UNDEFINED(add_overflow, "overflow", "a signed sum is out of its type's range")
MSLEMU_UNDEFINED(sub_overflow, "overflow", "a signed difference is out of its type's range")
MSLEMU_UNDEFINED(mul_overflow, "overflow", "a signed product is out of its type's range")
MSLEMU_UNDEFINED(negate_overflow, "overflow", "a signed negation is out of its type's range")
MSLEMU_UNDEFINED(shift_out_of_bounds, "undefined", "a shift by a negative amount or by the type's width or more")
MSLEMU_UNDEFINED(float_cast_overflow, "undefined", "a float is out of the range of the integer that it becomes")
MSLEMU_UNDEFINED(builtin_unreachable, "undefined", "unreachable code is reached")
void __ubsan_handle_divrem_overflow(SourceLocation* at, ...) {
  undefined("overflow", "division by zero, or of the lowest integer by -1", at);
  stop();  // a CPU would trap
}
void __ubsan_handle_missing_return(SourceLocation* at) {
  undefined("undefined", "a function ends without a return", at);
  stop();
}
void __ubsan_handle_out_of_bounds(SourceLocation* at, uintptr_t index) {
  char what[96];
  snprintf(what, sizeof what, "index %ld into an array of a fixed size", long(index));
  undefined("out-of-bounds", what, at);
  stop();
}
}
