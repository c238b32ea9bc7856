// What kernels share: a thread's place, strides, e^x.
namespace h2o {

// A thread's place in its threadgroup: its index among `count`, its lane, its SIMD-group among `groups`.
struct Threads {
  uint index, count, lane, group, groups;
};

// Where element [b, h, c] of an array begins; strides are mlx's, in elements: a pointer on Metal, an array on CUDA.
template <typename S>
inline long at(S strides, uint b, uint h, uint c) {
  return long(b) * strides[0] + long(h) * strides[1] + long(c) * strides[2];
}

// e^(x − top), 0 for a hidden slot; a NaN stays one.
inline float share(float x, float top) { return x == -INFINITY ? 0.0f : metal::exp(x - top); }

// The mass that one slot received: mean over g of e^(logit − top) / weight.
template <int G, typename P>
inline float received(P logits, const threadgroup float* top, const threadgroup float* weight) {
  float sum = 0.0f;
  for (int g = 0; g < G; ++g) sum += share(logits[g], top[g]) / weight[g];
  return sum / float(G);
}

}  // namespace h2o
