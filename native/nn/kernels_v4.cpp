#define FF_TABLE kernels_v4
#include "nn/kernels.inl"
