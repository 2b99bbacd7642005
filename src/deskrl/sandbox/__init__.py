"""harbor environments that isolate one trial each: bubblewrap (no Docker) and Modal."""
