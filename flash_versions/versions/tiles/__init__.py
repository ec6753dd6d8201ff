"""What kernels are made of: tiles of rows, masks, the softmax's step, copies and schedulers."""
