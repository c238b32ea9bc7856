// The shim's own bfloat functions stand in for MLX's, which call Apple's intrinsics.
#pragma once
