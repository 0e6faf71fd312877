# PyTorch, CPU stand-in: the one line that builders look for.
set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=1")
