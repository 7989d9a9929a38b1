"""What a run tells: metrics to files and trackers, a live view, a summary, a report."""
