#define FF_ISA "base"
#define FF_TABLE kernels_base
#include "simd/kernels.inl"
