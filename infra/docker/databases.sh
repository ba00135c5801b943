#!/bin/sh
# Makes a database with a role of its own for Prefect and for MLflow. The image of Postgres runs it once, when its volume
# is empty. Passwords come as variables and not as text of the statements, so that none need be quoted.
set -eu

for name in prefect mlflow; do
    case $name in
    prefect) password=${PREFECT_PASSWORD:?} ;;
    mlflow) password=${MLFLOW_PASSWORD:?} ;;
    esac
    psql --username "${POSTGRES_USER:-postgres}" --dbname postgres --no-psqlrc --quiet \
        --set ON_ERROR_STOP=1 --set name="$name" --set password="$password" <<'SQL'
CREATE ROLE :"name" LOGIN PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name" ENCODING 'UTF8';
REVOKE CONNECT ON DATABASE :"name" FROM PUBLIC;
SQL
done
# Prefect makes this extension, which its database's owner may not on every server.
psql --username "${POSTGRES_USER:-postgres}" --dbname prefect --no-psqlrc --quiet --set ON_ERROR_STOP=1 \
    --command 'CREATE EXTENSION IF NOT EXISTS pg_trgm'
