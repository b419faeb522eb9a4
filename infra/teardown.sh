#!/usr/bin/env bash
# Delete a stack and what its runs made: runtimes, queues, the relay. Results and logs stay unless you say otherwise.
#
#   infra/teardown.sh STACK [--relay RELAY_STACK] [--delete-results]
#
# Stop your runs first. If the script fails, run it again: it continues with what is left.
set -euo pipefail

usage() { sed -n 's/^# \{0,1\}//; 2,6p' "$0" >&2; exit 2; }
[[ $# -ge 1 && $1 != -* ]] || usage
stack=$1 relay='' delete_results=false
shift
while [[ $# -gt 0 ]]; do
  case $1 in
    --relay) [[ $# -ge 2 ]] || usage; relay=$2; shift 2 ;;
    --delete-results) delete_results=true; shift ;;
    *) usage ;;
  esac
done
control=(aws bedrock-agentcore-control)
made_by='made by rollout-backend' # the description of the runtimes that runs make

of_stack() { aws cloudformation describe-stacks --stack-name "$stack" --output text --query "Stacks[0].$1"; }
output() { of_stack "Outputs[?OutputKey=='$1'].OutputValue"; }
parameter() { of_stack "Parameters[?ParameterKey=='$1'].ParameterValue"; }
some() { [[ -n $1 && $1 != None ]]; } # the CLI's text for nothing is None

bucket=$(output BucketName)
role=$(output AgentRoleArn)
policy=$(output TrainerPolicyArn)
runtimes=$(output RuntimeId)
prefix=$(parameter ResultPrefix)
groups=$(parameter SecurityGroupIds | tr ',' ' ')

# queue_name PLACE: as the backend names the queue of the run in s3://BUCKET/PREFIXruns/RUN.
queue_name() {
  local run digest
  run=$(basename "$1" | tr -d '\n' | tr -c 'A-Za-z0-9_-' '-')
  digest=$(printf %s "$1" | if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -c1-8)
  echo "rollout-${run:0:52}-$digest"
}

delete_runtimes_of_runs() {
  local id its_role described
  for id in $("${control[@]}" list-agent-runtimes --query 'agentRuntimes[].agentRuntimeId' --output text); do
    some "$id" || continue
    its_role=$("${control[@]}" get-agent-runtime --agent-runtime-id "$id" --query roleArn --output text)
    described=$("${control[@]}" get-agent-runtime --agent-runtime-id "$id" --query description --output text)
    [[ $its_role == "$role" && $described == "$made_by" ]] || continue
    groups+=" $("${control[@]}" get-agent-runtime --agent-runtime-id "$id" --output text \
      --query 'networkConfiguration.networkModeConfig.securityGroups')"
    echo "deleting runtime $id"
    "${control[@]}" delete-agent-runtime --agent-runtime-id "$id" >/dev/null
    runtimes+=" $id"
  done
}

delete_queues_of_runs() {
  local ours=' ' run url name
  for run in $(aws s3api list-objects-v2 --bucket "$bucket" --prefix "${prefix}runs/" --delimiter / \
    --query 'CommonPrefixes[].Prefix' --output text); do
    some "$run" || continue
    name=$(queue_name "s3://$bucket/${run%/}")
    ours+="$name $name-dlq "
  done
  for url in $(aws sqs list-queues --queue-name-prefix rollout- --query 'QueueUrls[]' --output text); do
    some "$url" || continue
    name=$(basename "$url")
    if [[ $ours == *" $name "* ]]; then
      echo "deleting queue $name"
      aws sqs delete-queue --queue-url "$url"
    else
      echo "queue $name stays: $bucket holds no run of that name, so it may be another stack's"
    fi
  done
}

# A policy that is attached outside the stack, as the trainer's is, cannot be deleted with the stack.
detach_policy() {
  local kind name
  for kind in Role User Group; do
    for name in $(aws iam list-entities-for-policy --policy-arn "$policy" \
      --query "Policy${kind}s[].${kind}Name" --output text); do
      some "$name" || continue
      kind=$(echo "$kind" | tr '[:upper:]' '[:lower:]')
      echo "detaching the trainer's policy from $kind $name"
      aws iam "detach-$kind-policy" "--$kind-name" "$name" --policy-arn "$policy"
    done
  done
}

delete_stack() {
  echo "deleting stack $1"
  aws cloudformation delete-stack --stack-name "$1"
  aws cloudformation wait stack-delete-complete --stack-name "$1" || {
    echo "stack $1 could not be deleted:" >&2
    aws cloudformation describe-stack-events --stack-name "$1" --output text \
      --query "StackEvents[?ResourceStatus=='DELETE_FAILED'].[LogicalResourceId, ResourceStatusReason]" >&2
    exit 1
  }
}

delete_logs() {
  local id group
  for id in $runtimes; do
    some "$id" || continue
    for group in $(aws logs describe-log-groups --output text --query 'logGroups[].logGroupName' \
      --log-group-name-prefix "/aws/bedrock-agentcore/runtimes/$id-"); do
      some "$group" || continue
      echo "deleting log group $group"
      aws logs delete-log-group --log-group-name "$group"
    done
  done
}

report_network_interfaces() {
  local group found=''
  for group in $groups; do
    some "$group" || continue
    found+=$(aws ec2 describe-network-interfaces --filters "Name=group-id,Values=$group" --output text \
      --query "NetworkInterfaces[?InterfaceType=='agentic_ai'].[NetworkInterfaceId, SubnetId, '$group']")
    found+=$'\n'
  done
  found=$(sort -u <<<"$found" | sed '/^$/d; /^None$/d')
  [[ -n $found ]] || return 0
  echo "AgentCore keeps these network interfaces for up to 8 hours. You cannot delete them earlier, and until then the"
  echo "subnets and security groups cannot be deleted either:"
  echo "$found"
}

delete_runtimes_of_runs
delete_queues_of_runs
detach_policy
[[ -z $relay ]] || delete_stack "$relay"
delete_stack "$stack"
if $delete_results; then
  echo "deleting bucket $bucket"
  aws s3 rb --force "s3://$bucket"
  delete_logs
else
  echo "the results stay in s3://$bucket, and the agents' logs under /aws/bedrock-agentcore/runtimes/ in CloudWatch"
fi
report_network_interfaces
