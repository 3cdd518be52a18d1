"""What the plug-ins for other libraries share: limits of the kernels, in words, the replacement of
functions, and warnings."""
