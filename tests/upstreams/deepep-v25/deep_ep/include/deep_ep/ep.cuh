// Kernels of V2.5 are compiled from here on the nodes (CPU stand-in: there are none).
#pragma once
