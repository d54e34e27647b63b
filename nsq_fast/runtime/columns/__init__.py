"""What a ColumnSubscription is made of."""
