// What a compiled kernel and the runtime know of each other. No system header: a kernel sees MSL and nothing else.
#pragma once

struct MslemuUint3 {
  unsigned x, y, z;
};

// A thread's attributes, under the names that MSL gives them.
struct MslemuPlace {
  MslemuUint3 dispatch_threads_per_threadgroup, grid_origin, grid_size, thread_position_in_grid,
      thread_position_in_threadgroup, threadgroup_position_in_grid, threadgroups_per_grid, threads_per_grid,
      threads_per_threadgroup;
  unsigned dispatch_quadgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, quadgroup_index_in_threadgroup,
      quadgroups_per_threadgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup, thread_execution_width,
      thread_index_in_quadgroup, thread_index_in_simdgroup, thread_index_in_threadgroup, threads_per_simdgroup;
};

// Where a kernel calls the runtime, for reports and to tell one barrier from another.
struct MslemuCall {
  const char* what;
  const char* file;
  unsigned line;
};

enum MslemuAccess { MSLEMU_READ = 1, MSLEMU_WRITE = 2, MSLEMU_BOTH = 3 };

extern "C" {
// flags as in metal::mem_flags: 1 device, 2 threadgroup.
void mslemu_barrier(unsigned flags, MslemuCall call);
void mslemu_simd_barrier(unsigned flags, MslemuCall call);
// Gives *value to the SIMD-group, waits for all live lanes, copies their 32 values to `lanes`; returns who took part.
unsigned mslemu_gather(const void* value, void* lanes, unsigned size, MslemuCall call);
unsigned mslemu_lane();
unsigned mslemu_simd_order();
void mslemu_inactive_lane(unsigned lane, MslemuCall call);
// Storage of the kernel's threadgroup variable number `index`: the same for all threads of a threadgroup.
void* mslemu_threadgroup(unsigned index, unsigned long size, unsigned long item, const char* name, MslemuCall call);
void mslemu_atomic(const volatile void* address, unsigned size, MslemuAccess access, MslemuCall call);
// Written with each kernel: one thread of it.
void mslemu_entry(void* const* arguments, const MslemuPlace* place);
}
