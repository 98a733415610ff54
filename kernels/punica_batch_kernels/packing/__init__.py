"""Adapter files' matrices on the device, brought into the layout that the SGMV kernels read."""
