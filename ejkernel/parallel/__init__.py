"""What a mesh of devices needs: how the operations split over it."""
