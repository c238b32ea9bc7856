// What stands before each kernel: the standard library and MLX's own utilities, from MLX's wheel.
#pragma once
#include <metal_stdlib>

#include "mlx/backend/metal/kernels/utils.h"
