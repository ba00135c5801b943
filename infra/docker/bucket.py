"""Makes an S3 bucket where it is missing: `python infra/docker/bucket.py NAME`, by the AWS_ variables' key and MLFLOW_S3_ENDPOINT_URL."""

from __future__ import annotations

import os
import sys

import boto3
from botocore.exceptions import ClientError


def make_bucket(name: str) -> bool:
    """Whether it had to be made. Raises botocore's errors where the store refuses, or is not there."""
    client = boto3.client("s3", endpoint_url=os.environ.get("MLFLOW_S3_ENDPOINT_URL"))
    try:
        client.head_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("404", "NoSuchBucket"):
            raise
        client.create_bucket(Bucket=name)
        return True
    return False


if __name__ == "__main__":
    print(f"bucket {sys.argv[1]}: {'made' if make_bucket(sys.argv[1]) else 'there'}")
