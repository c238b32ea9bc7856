// The threads of a threadgroup as fibers: a stack each, and the switch between them.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "runtime.h"

namespace mslemu {

constexpr size_t kStack = 128 * 1024;

enum State { kReady, kAtBarrier, kAtSimd, kDone };

struct Fiber {
  char* stack;
  void* sp;
  State state;
  MslemuCall call;  // what it waits in
  unsigned flags, size;
  alignas(16) char value[16];  // what it gives to its SIMD-group
  MslemuPlace place;
};

// Saves the callee's registers on the running stack and goes on where `to` was saved. By its assembler name, since
// Mach-O puts an underscore before a C name and ELF doesn't.
extern "C" void mslemu_switch(void** save, void* to) asm("mslemu_switch");

#if defined(__x86_64__)
asm(R"(
.text
mslemu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void* first_frame(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // where a return address would be: the ABI wants the stack 8 off 16 at entry
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 2
mslemu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
inline void* first_frame(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(top - 160);
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void*>(entry);  // x30, where the switch returns to
  return sp;
}
#else
#error "mslemu knows x86-64 and aarch64"
#endif

// Pages that cost nothing until they are touched.
inline char* reserve(size_t bytes) {
  return static_cast<char*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

}  // namespace mslemu
