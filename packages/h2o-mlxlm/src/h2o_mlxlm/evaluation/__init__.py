"""What a bounded cache costs in quality, against the full cache: loss, retrieval, free generation.

The parts are functions over a loaded model; printing and flags are the command line's.
"""
