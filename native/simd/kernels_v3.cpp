#define FF_ISA "v3"
#define FF_TABLE kernels_v3
#include "simd/kernels.inl"
