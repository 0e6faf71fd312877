// DeepEP V2, CPU stand-in: a header that kernels compiled on the nodes would include.
#pragma once
