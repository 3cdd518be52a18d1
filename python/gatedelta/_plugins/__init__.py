"""What the plug-ins for other libraries share: limits of the kernels, in words, and the replacement of functions."""
