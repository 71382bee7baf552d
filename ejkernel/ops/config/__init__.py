"""Where configurations come from: overlays, memory, disk, shipped defaults, tuning, heuristics."""
