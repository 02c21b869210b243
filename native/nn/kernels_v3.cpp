#define FF_TABLE kernels_v3
#include "nn/kernels.inl"
