#define FF_TABLE kernels_base
#include "nn/kernels.inl"
