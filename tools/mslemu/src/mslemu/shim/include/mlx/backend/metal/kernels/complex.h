// MLX's complex_t overloads its methods by address space, which no other compiler can parse. Storage, + - * are kept.
#pragma once
#include <metal_stdlib>
using namespace metal;

template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T r) : real(r), imag(0) {}
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  friend complex_t operator+(complex_t a, complex_t b) { return {a.real + b.real, a.imag + b.imag}; }
  friend complex_t operator-(complex_t a, complex_t b) { return {a.real - b.real, a.imag - b.imag}; }
  friend complex_t operator*(complex_t a, complex_t b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
};
typedef complex_t<float> complex64_t;

template <typename T>
static constexpr constant bool is_complex_v = false;
template <typename T>
static constexpr constant bool is_complex_v<complex_t<T>> = true;
