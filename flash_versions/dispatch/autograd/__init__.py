"""Computing a request, as torch sees it: plain functions, operators, a node of autograd."""
