"""The executable specification: numpy, float64, slow and obvious. It judges every other implementation."""
