// Logging needs methods in the constant address space; kernels given to mx.fast don't use it.
#pragma once
