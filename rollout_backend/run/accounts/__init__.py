"""What a run writes about itself: records, reports, the archive, metrics, progress."""
