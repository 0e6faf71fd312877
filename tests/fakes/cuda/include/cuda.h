/* Fake CUDA toolkit: a version and nothing else. */
#pragma once
#define CUDA_VERSION 12090
