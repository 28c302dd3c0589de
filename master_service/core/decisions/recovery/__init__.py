"""Members with parameters are lost: whether, to which checkpoint the job goes back, where its queue stood then, and who returns alone."""
