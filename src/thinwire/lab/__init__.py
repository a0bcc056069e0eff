"""Methods and studies that few run, all working. It comes in by entry points; nothing outside imports it."""
