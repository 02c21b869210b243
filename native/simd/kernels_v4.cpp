#define FF_ISA "v4"
#define FF_TABLE kernels_v4
#include "simd/kernels.inl"
